"""Boxes: which part of a tensor a rank holds, and who sends what to whom."""
