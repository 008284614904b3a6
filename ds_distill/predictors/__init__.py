"""A shipped student on texts: labels, entities, answers. Begin with `prediction`."""
