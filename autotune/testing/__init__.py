"""What users who extend the product can test their parts with."""
