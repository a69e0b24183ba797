"""The sets that a ball of images reaches in a network: linear maps and remainders, measured around a clean image."""
