"""Linear maps and remainders of a whole network, measured around a clean image: method `image`."""
