"""The provable properties of a module: rules of first and second order, and the functions they are made of."""
