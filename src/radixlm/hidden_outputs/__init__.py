"""What requests get of hidden states: prompt log-probabilities, vectors, scores, the states."""
