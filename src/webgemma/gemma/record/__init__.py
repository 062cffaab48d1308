"""The ops that every part of a model is recorded with, and the one door for matrix products."""
