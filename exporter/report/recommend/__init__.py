"""What could be given back, shared or made smaller: suggestions with evidence, money and risk."""
