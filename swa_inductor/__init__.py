"""swa_inductor: sliding-window attention over ring caches for torch.compile.

Importing the package registers the ops (`torch.ops.swa_inductor.*`) and their Inductor lowerings.
"""

from swa_inductor import lowerings as _lowerings  # noqa: F401  registers the ops and their lowerings
from swa_inductor.api import attention, store
from swa_inductor.errors import InvalidArgumentError, UnsupportedError
from swa_inductor.spec import RingSpec

__version__ = "0.1.0"

__all__ = ["InvalidArgumentError", "RingSpec", "UnsupportedError", "__version__", "attention", "store"]
