"""The formulas: advantages, policy losses, schedules, scores. Pure functions that know no engine and no rank."""
