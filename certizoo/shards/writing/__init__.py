"""Sources of images and text, a look at them, and the shards written from them."""
