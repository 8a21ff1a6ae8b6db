"""The compiled train step: optimizer, schedules, precision, state."""
