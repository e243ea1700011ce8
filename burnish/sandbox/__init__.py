"""Run code of a model where it can do no harm, and grade it."""
