"""From a study or a job to one self-contained page: plain data, then figures, then HTML."""
