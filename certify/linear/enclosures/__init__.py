"""Operations enclosed between linear functions on boxes of their inputs, one kind a file."""
