"""The first and second order of a network in a ball, by one backward pass: method `adjoint`."""
