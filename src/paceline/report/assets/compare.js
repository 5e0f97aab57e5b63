"use strict";
followTheme(() => {});
document.documentElement.dataset.ready = "true";
