"""The base package: version, user errors, and one repair of a library. Every package may import it.

It imports nothing of the project and nothing slow: many processes need no torch.
"""

from certizoo.errors import UserError

__version__ = "0.1.0"
__all__ = ["UserError", "__version__"]
