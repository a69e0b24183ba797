"""The one door to MLflow: track runs, publish certified models, browse what was published.

Importing this package is cheap; MLflow itself is imported by the first function that needs it.
"""

from registry import browse, publish, track

__all__ = ["browse", "publish", "track"]
