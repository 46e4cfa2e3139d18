"""In-memory and durable checkpoints of a run, and the decision which one to restore."""

from zero2all.checkpoint.checkpoint_manager import CheckpointManager, CheckpointPlaces
from zero2all.checkpoint.checkpoint_store import CheckpointStore
from zero2all.checkpoint.inspection import CheckpointWeights
from zero2all.checkpoint.live_state import CheckpointedModel
from zero2all.checkpoint.lock import run_lock
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.replicas import ReplicaOptions
from zero2all.checkpoint.restore_point import DamagedStateError, RestorePoint
from zero2all.checkpoint.slot_directories import SHM_DIRECTORY, flash_directory
from zero2all.checkpoint.training_state import (
    CheckpointCallbacks,
    CheckpointPhase,
    InitialWeights,
    RunIdentity,
    SentReplica,
    TrainingState,
)

__all__ = [
    "SHM_DIRECTORY",
    "CheckpointCallbacks",
    "CheckpointManager",
    "CheckpointPhase",
    "CheckpointPlaces",
    "CheckpointStore",
    "CheckpointWeights",
    "CheckpointedModel",
    "DamagedStateError",
    "InitialWeights",
    "RankGroup",
    "ReplicaOptions",
    "RestorePoint",
    "RunIdentity",
    "SentReplica",
    "TrainingState",
    "flash_directory",
    "run_lock",
]
