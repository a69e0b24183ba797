"""Views of images: augmentations, the evaluation view, and their kernels."""
