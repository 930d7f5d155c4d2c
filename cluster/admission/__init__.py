"""What is let in, how long it may take, and what is refused: deadlines, queue bounds, drain rates."""
