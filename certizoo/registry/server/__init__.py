"""The MLflow store: where it is, how it is reached, and its pages in a browser."""
