"""What runs inside SGLang's scheduler process: reached only through the seams that the patch series puts there."""
