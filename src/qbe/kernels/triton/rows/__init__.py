"""What is done to each row by itself: norms, rotary embeddings, gates, difficulty, the cascade."""
