"""Margins on a ball of images, by its ellipsoids: method `image`."""
