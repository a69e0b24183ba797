"""What every folder of the project may import: the version, the error a person sees, and one library repair.

This package imports nothing of the project.
"""

from certizoo.compat import define_missing_torchvision_ops
from certizoo.errors import UserError

__version__ = "0.1.0"
__all__ = ["UserError", "__version__"]

define_missing_torchvision_ops()
