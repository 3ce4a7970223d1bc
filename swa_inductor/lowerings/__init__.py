"""Inductor lowerings, one file per op. Importing this package registers them and tags the compile caches.

The same order in every file: the launch configuration, the grid, the template, the lowering of each device.
"""

import swa_inductor.meta  # noqa: F401  the ops exist before their lowerings
from swa_inductor.lowerings import attention, store
from swa_inductor.lowerings._template import tag_compile_caches

tag_compile_caches()

__all__ = ["attention", "store"]
