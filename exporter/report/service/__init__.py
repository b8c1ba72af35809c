"""The cost service: a fleet's money as pages, as JSON and as series."""
