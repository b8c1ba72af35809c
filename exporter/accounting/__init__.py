"""From readings and holders to activity, idleness, metered seconds, energy and money."""
