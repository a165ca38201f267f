"""Tools for testing specs and engines: a slow reference loader, hypothesis strategies, and the guarantees as functions."""
