"""Megatron-Core: the model, its Hugging Face weights, packing, the optimizer and checkpoints.

The driver may import these; they load no torch:

    settings        what all Megatron stages are told: MegatronConfig
    layout          ranks of a stage, checked against a model folder
    lora_settings   adapters;  moe_settings  experts
    hf_config       what we read from a folder's config.json
    batching        which samples go into one micro-batch (bin_packing)

In a stage's process, from the stages down:

    session         the way in from the stages
    policy_update   the optimizer steps of one update;  objective  the loss of one micro-batch
    trainer         a policy, its gradients and its optimizer (optimizer, offload)
    policy          a model that scores samples
    model           Megatron's model from micro-batches to log-probabilities (transformer, layers, rotary, output,
                    logprob; fused for what a GPU does in one pass)
    moe             experts (router, router_context);  lora  adapters (lora_linear, peft_format)
    batch           samples packed into micro-batches
    rules           Hugging Face names and Megatron's parts; weights loads and gathers by them (folder, export)
    weight_buffer   weights laid out for those that read them where they are
    checkpoint      everything that a resumed run needs (checkpoint_writer, optimizer_state, checkpoint_export)
    parallel        the process group and Megatron's groups
    cpu_platform    Megatron without CUDA;  mcore  all that we import of Megatron, once the platform is prepared
"""
