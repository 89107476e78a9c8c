"""All that we use of Megatron-Core, imported once the platform is prepared: import it from here, never directly."""

# ruff: noqa: E402

from __future__ import annotations

from rollstream.stages.megatron import cpu_platform

cpu_platform.prepare()

from megatron.core import dist_checkpointing
from megatron.core import parallel_state as state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

__all__ = [
    "COMMON_STATE_FNAME",
    "CheckpointingConfig",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GPTModel",
    "MoEAlltoAllTokenDispatcher",
    "MoELayer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "RowParallelLinear",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "clip_grad_by_total_norm_fp32",
    "copy_to_tensor_model_parallel_region",
    "dist_checkpointing",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_expert_parallel_rng_tracker_name",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "is_main_replica",
    "make_sharded_tensors_for_checkpoint",
    "model_parallel_cuda_manual_seed",
    "moe_utils",
    "nested_values",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "save_config",
    "save_preprocess",
    "state",
    "torch_strategies",
]
