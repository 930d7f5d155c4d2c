"""Answers that the server keeps: what is kept of each, who has copies of it, and how it is made again."""
