"""What is provable of a module: the rules of first and second order, and the functions they are made of."""
