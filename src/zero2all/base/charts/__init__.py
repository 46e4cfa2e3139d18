"""Charts of every report: what they show (``plot``), in a terminal (``terminal``) and as SVG (``svg``)."""
