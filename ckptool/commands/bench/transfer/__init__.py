"""ckptool's own commands, measured against cp and torch's tools."""
