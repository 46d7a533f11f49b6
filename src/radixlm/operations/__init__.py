"""What operators ask of a scheduler, and what its log tells them."""
