"""The built-in learning-rate schedules: one file for each, whose name is the schedule's."""
