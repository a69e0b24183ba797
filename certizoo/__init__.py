"""What every folder of the project may import: the version, the error a person sees, and one library repair.

This package imports nothing of the project, and itself nothing that is slow: many a process needs no torch.
"""

from certizoo.errors import UserError

__version__ = "0.1.0"
__all__ = ["UserError", "__version__"]
