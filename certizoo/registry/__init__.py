"""The only module that uses MLflow: track runs, publish certified models, browse published versions.

Importing this package is cheap; the first function that needs MLflow imports it.
"""

from certizoo.registry import browse
from certizoo.registry.tracking import track
from certizoo.registry.versions import publish

__all__ = ["browse", "publish", "track"]
