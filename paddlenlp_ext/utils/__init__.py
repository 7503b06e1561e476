"""Small things that every floor may use. Nothing here imports Paddle."""
