"""Fakes of the commands with which workers are reached: they really run what they are told, as local processes."""
