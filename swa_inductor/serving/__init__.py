"""Serving on rings: what a model must offer, and decode steps that the host launches without knowing their lengths.

`SlotModel` is the interface of a model; `SmallModel` a small one written with the public ops, as an example.
`DecodeStep` runs draft, metadata, layers, sampling and verification as one compiled function and one CUDA graph.
"""

from swa_inductor.serving._sequences import SequenceState
from swa_inductor.serving.decode_step import DecodeStep, StepResult, StepTokens
from swa_inductor.serving.model import SlotModel
from swa_inductor.serving.small_model import SmallModel

__all__ = ["DecodeStep", "SequenceState", "SlotModel", "SmallModel", "StepResult", "StepTokens"]
