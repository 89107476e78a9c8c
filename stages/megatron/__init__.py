"""Megatron-Core: the model, its Hugging Face weights, packing, the optimizer and checkpoints.

    layout         ranks of a stage, checked against a model folder on the driver
    hf_config      what we read from a folder's config.json

    session        what a stage holds in its process: the way in from the stages
    policy_update  the optimizer steps of one update
    objective      the loss of one micro-batch
    trainer        a policy, its gradients and its optimizer (optimizer)
    policy         a model that scores samples (model, layers)
    batch          samples packed into micro-batches
    logprob        log-probabilities over a vocabulary split between ranks
    rules          Hugging Face names and Megatron's parts; weights reads and gathers by them, export writes a folder
    checkpoint     everything that a resumed run needs
    parallel       the process group and Megatron's groups
    cpu_platform   Megatron without CUDA; mcore is all that we import of Megatron, once the platform is prepared

Only the first two may be imported on the driver: the others load torch and Megatron.
"""
