"""The dashboard and the labelling page. They read run directories and never hook into the step."""
