"""Operations: a reference in plain Paddle for each, faster twins, and the choice between them."""
