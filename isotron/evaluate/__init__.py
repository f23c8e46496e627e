"""Tasks over a callable that gives log-probabilities; knows neither training nor the engine."""
