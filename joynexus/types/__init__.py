"""The data that crosses modules and processes: numpy and plain values, never torch, so that it ships cheaply.

Shapes use: ``b`` rows, ``c`` cameras in the policy's order, ``h`` and ``w`` pixels, ``s`` state, ``t`` horizon of an
action chunk, ``a`` action, ``n`` decisions (chunks) of a trajectory, ``p`` prefix positions, ``d`` their width, ``k``
K/V heads and ``e`` their width. Images are uint8 HWC; states and actions are in the environment's own units:
normalisation belongs to the policy and happens beside its module.
"""

from joynexus.types.acting import ActionChunk, EpisodeReport, PredictRequest, Trajectory
from joynexus.types.arrays import Array, Arrays
from joynexus.types.observation import Observation, PrefixArrays, ViewSpec, broadcast_instructions
from joynexus.types.policy import NormalizationStats, PolicySnapshot, PolicyStats
from joynexus.types.training import (
    NEVER_STALE,
    LaneItem,
    Loss,
    TrainingBatch,
    TrainingCall,
    TrainingResult,
    WorkloadProgress,
)

__all__ = [
    "NEVER_STALE",
    "ActionChunk",
    "Array",
    "Arrays",
    "EpisodeReport",
    "LaneItem",
    "Loss",
    "NormalizationStats",
    "Observation",
    "PolicySnapshot",
    "PolicyStats",
    "PredictRequest",
    "PrefixArrays",
    "TrainingBatch",
    "TrainingCall",
    "TrainingResult",
    "Trajectory",
    "ViewSpec",
    "WorkloadProgress",
    "broadcast_instructions",
]
