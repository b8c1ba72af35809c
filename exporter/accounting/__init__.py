"""From readings and holders to activity, idleness and, later, metered seconds and money."""
