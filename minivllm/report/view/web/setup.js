// What the other files share.

const { html, render, useState, useEffect, useRef } = htmPreact;
