"""Replaying public request traces through the real manager, without a model: trace, sequential, timed, optimum."""
