"""DiLoCo: islands train alone for many steps and exchange pseudo-gradients over a slow network."""
