"""Rows of a training set -> token ids and loss mask -> batches; knows no model."""
