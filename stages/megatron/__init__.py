"""Megatron-Core: the model, its Hugging Face weights, packing, the optimizer and checkpoints.

    platform    one CPU platform: Megatron without CUDA
    layout      ranks of a stage, checked against a model folder on the driver
    hf_config   what we read from a folder's config.json
    parallel    the process group and Megatron's parallel state
    model       GPTModel with our normalisation and attention
    weights     Hugging Face names to Megatron shards and back
    batch       samples packed into micro-batches
    logprob     log-probabilities over a vocabulary split between ranks
    policy      a model that scores samples
    trainer     a model, its gradients and its optimizer
    objective   the loss of one micro-batch
    checkpoint  everything that a resumed run needs

Only `layout` and `hf_config` may be imported on the driver: the others load torch and Megatron.
"""
